from policy_rig import stub

__all__ = ["stub"]
