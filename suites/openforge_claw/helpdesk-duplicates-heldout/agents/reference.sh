tool helpdesk_list '{}' >/dev/null
tool helpdesk_get '{"id": "h-1"}' >/dev/null
tool helpdesk_get '{"id": "h-2"}' >/dev/null
tool helpdesk_get '{"id": "h-3"}' >/dev/null
tool helpdesk_get '{"id": "h-4"}' >/dev/null
tool helpdesk_get '{"id": "h-5"}' >/dev/null
tool helpdesk_get '{"id": "h-6"}' >/dev/null
tool helpdesk_get '{"id": "h-7"}' >/dev/null
tool helpdesk_get '{"id": "h-8"}' >/dev/null
tool helpdesk_update '{"id": "h-3", "status": "closed", "duplicate_of": "h-1"}' >/dev/null
tool helpdesk_update '{"id": "h-6", "status": "closed", "duplicate_of": "h-2"}' >/dev/null
tool helpdesk_update '{"id": "h-8", "status": "closed", "duplicate_of": "h-1"}' >/dev/null
echo 'Three duplicates are closed.'
