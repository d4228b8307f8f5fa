"""Uploads user code and the runtime to the Slurm cluster, as immutable directories that are named by the hash of their content.

Nothing is fetched from the cluster here. Begin with `bundle` for what is sent and `deliver` for how.
"""

from .bundle import Bundle, bundle_directory, bundle_files, make_bundle
from .deliver import Installed, install
from .manifest import Entry, Limits, Manifest
from .tree import scan, scan_files

__all__ = [
    "Bundle",
    "Entry",
    "Installed",
    "Limits",
    "Manifest",
    "bundle_directory",
    "bundle_files",
    "install",
    "make_bundle",
    "scan",
    "scan_files",
]
