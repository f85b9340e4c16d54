"""Who is in the training cluster: workers and parameter servers find each other by one small interface."""
