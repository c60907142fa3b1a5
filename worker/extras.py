"""Says how to install what a producer's installation leaves out."""

from __future__ import annotations

# Not by name from the package index: what is called millrace there is not this project.
INSTALL_MONITOR = 'pip install -e ".[monitor]" in the checkout'
INSTALL_ENGINE = 'pip install -e ".[engine]" in the checkout'

# Not by name from the package index: what is called millrace there is not this project.
INSTALL_TRACING = 'pip install -e ".[tracing]" in the checkout'
