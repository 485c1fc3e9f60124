"""The page on trends: what a history of runs shows, and how often it is wrong."""
