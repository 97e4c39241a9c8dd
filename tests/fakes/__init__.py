"""Stand-ins for the services that the program talks to, as real servers on loopback."""
