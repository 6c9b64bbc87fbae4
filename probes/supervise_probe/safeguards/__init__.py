"""What is armed around each update: it changes a few steps of training without going back."""
