assert __name__ == "slipstream.rollout", "import slipstream.rollout"
