"""The local executor: a whole run as processes of one machine, and what a person sees of it."""
