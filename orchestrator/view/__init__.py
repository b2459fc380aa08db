"""slipstream view: a local page that shows runs from their folders, while they go on or afterwards."""
