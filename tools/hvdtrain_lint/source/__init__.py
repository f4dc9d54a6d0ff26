"""What is known of a script from its syntax tree; the script is not run."""
