"""rollout: the episodes of a shard, from rollout rows to episodes, calls and blobs."""
