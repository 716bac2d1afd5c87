"""The job: schedule, metrics and the trainer that puts data, model and the mixed-precision engine together."""
