"""The stall watch: reports which ranks an operation waits for."""
