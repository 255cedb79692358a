"""The drop-in: subclasses of upstream's tree manager and recording, and what hands functions to them."""
