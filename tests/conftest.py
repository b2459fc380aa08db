"""Makes `fakes` importable from every tier: pytest puts this folder on sys.path."""
