"""The subcommands that start ranks, and those that write what starts them."""
