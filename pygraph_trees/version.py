"""The version of the package; part of Inductor's cache keys while the patches are on."""

__version__ = "0.1.0"
