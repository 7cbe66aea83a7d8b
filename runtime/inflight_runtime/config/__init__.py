"""Role configs: the models (:mod:`.roles`) and their rendering from a job's spec (:mod:`.render`)."""
