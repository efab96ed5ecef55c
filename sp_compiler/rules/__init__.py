"""The sharding rules: one table from ATen operator to the factors of its dimensions."""
