"""Build, inspect and install what is shipped (Debian packages, archives for PyPI, images) on separate machines."""
