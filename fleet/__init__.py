assert __name__ == "slipstream.fleet", "import slipstream.fleet"
