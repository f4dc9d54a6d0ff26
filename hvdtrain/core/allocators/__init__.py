"""Memory of the node that serves allocations of a framework, for gradients that stay there."""
