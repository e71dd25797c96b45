"""What tests share: random problems, the oracle, ranks."""
