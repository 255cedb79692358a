"""What a server does before its first request, so that no request pays for it."""

from __future__ import annotations
