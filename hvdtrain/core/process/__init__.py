"""Control of a rank's own process: output, exits, memory and threads."""
