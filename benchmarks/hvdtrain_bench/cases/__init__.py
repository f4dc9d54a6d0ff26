"""What is measured, one file per benchmark."""
