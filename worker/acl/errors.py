"""What can be wrong with a user's password.

Exception
  UnusablePassword    its file cannot be read or made, or holds no password that is worth its name
"""

from __future__ import annotations


class UnusablePassword(Exception):
    """A password file that cannot be used; the message names the file."""
