assert __name__ == "slipstream.weight_sync", "import slipstream.weight_sync"
