"""The real core on ports in memory, under every misfortune that the ports can bring."""
