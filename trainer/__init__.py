assert __name__ == "slipstream.trainer", "import slipstream.trainer"
