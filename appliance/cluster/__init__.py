"""What runs on the machines of a cluster of Ray Serve: Ray itself, the replicas, and the directory that finds them."""
