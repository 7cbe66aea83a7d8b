"""The project's images, built on this machine by buildah on a Debian base of its own, and kept between sessions."""

from __future__ import annotations

from .build import TARGETS, Image, build_image

__all__ = ["TARGETS", "Image", "build_image"]
