"""What the router's sockets are: connections to clients and to instances, answers of its own."""
