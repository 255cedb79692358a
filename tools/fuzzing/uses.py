"""The named features that a case uses; a campaign counts cases by feature, to show that each one is tried."""

from __future__ import annotations

from .case import Case

USES = (
    "backward",
    "saved-tensor hooks",
    "special tangents",
    "finalizers that call",
    "hooks that call or collect",
    "threads",
    "streams and devices",
    "constant chains",
    "outputs kept alive",
)


def uses(case: Case) -> tuple[str, ...]:
    """The features in :data:`USES` that a case uses."""
    around = case.around
    found = (
        case.backward,
        case.backward and around.saved is not None,
        case.backward and bool(around.tangents),
        around.garbage is not None,
        bool(around.events),
        around.thread is not None,
        around.where is not None,
        bool(case.constants),
        around.keeps > 0 or around.step_of > 1,
    )
    return tuple(name for name, used in zip(USES, found, strict=True) if used)
