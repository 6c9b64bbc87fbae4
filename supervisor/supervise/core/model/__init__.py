"""The nouns: events, decisions, actions, the policy, and the tables that they are judged by."""
