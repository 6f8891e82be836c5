"""Administration: topics, groups, subscriptions and schedules."""
