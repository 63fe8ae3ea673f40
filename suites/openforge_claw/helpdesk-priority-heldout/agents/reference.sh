cat policy.md plans.csv >/dev/null
tool helpdesk_list '{"status": "open"}' >/dev/null
tool helpdesk_update '{"id": "h-1", "priority": "high"}' >/dev/null
tool helpdesk_update '{"id": "h-2", "priority": "urgent"}' >/dev/null
tool helpdesk_update '{"id": "h-3", "priority": "normal"}' >/dev/null
tool helpdesk_update '{"id": "h-4", "priority": "high"}' >/dev/null
tool helpdesk_update '{"id": "h-5", "priority": "low"}' >/dev/null
tool helpdesk_update '{"id": "h-6", "priority": "urgent"}' >/dev/null
echo 'All tickets have their priority.'
