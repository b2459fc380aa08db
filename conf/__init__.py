"""Options of a run: typed, frozen, validated. No logic beyond validation lives here."""

assert __name__ == "slipstream.conf", "import slipstream.conf"
