"""What runs an instance live, with a thread for its worker and one for its messages."""
