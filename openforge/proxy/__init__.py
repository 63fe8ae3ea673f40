"""The recording proxy between a harness and the policy server.

`server` serves sessions, `chat`, `responses` and `messages` are its dialects (`dialect` says what one is), `upstream`
the one call to the policy, `journal` what is on disk before an answer leaves, `lineage` turns a journal into rows of
the calls table, `client` starts and drives a proxy process from a rollout job.
"""
