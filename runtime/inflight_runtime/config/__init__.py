"""Role configs: the models (:mod:`.roles`), their rendering from a job (:mod:`.render`), checks (:mod:`.checks`).

Nothing is imported here: every role's process reads :mod:`.roles` and needs no model of the custom resource.
"""
