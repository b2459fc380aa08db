"""Slipstream. Its packages are folders of the checkout, linked here (docs/decisions/0037-one-top-level-name.md)."""
