"""Launchers: what must be there before a payload starts, and how it is started."""

from .base import Launcher
from .bash import BashLauncher
from .ray import RayLauncher

__all__ = ["BashLauncher", "Launcher", "RayLauncher"]
