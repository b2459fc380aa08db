assert __name__ == "slipstream.orchestrator", "import slipstream.orchestrator"
