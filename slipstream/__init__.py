"""All of the product. Its packages are folders of the checkout, linked here (docs/decisions/0037)."""
