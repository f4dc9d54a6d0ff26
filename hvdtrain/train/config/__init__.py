"""Options from YAML files and from text."""
