"""A mark for tests of 8-bit products."""

from __future__ import annotations

import pytest
import torch

needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="needs a CPU with AVX-512 VNNI")
