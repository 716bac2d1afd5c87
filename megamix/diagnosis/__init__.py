"""What a run says of overflows, and when it gives up."""
