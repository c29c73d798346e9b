"""What each verb of the command line does, without its words: on this rank, or on all local ones."""
