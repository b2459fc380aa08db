"""Options of a run: typed, frozen, validated. No logic beyond validation lives here."""
