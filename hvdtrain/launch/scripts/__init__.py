"""What scripts of other libraries need beside variables: settings, a watch, and an end."""
