tool helpdesk_list '{"status": "open"}' >/dev/null
tool notes_search '{"query": "refund"}' >/dev/null
tool notes_get '{"id": "n-1"}' >/dev/null
tool helpdesk_get '{"id": "h-1"}' >/dev/null
tool mail_search '{"query": "R-301"}' >/dev/null
tool helpdesk_get '{"id": "h-2"}' >/dev/null
tool mail_search '{"query": "R-207"}' >/dev/null
tool mail_get '{"id": "m-4"}' >/dev/null
tool helpdesk_reply '{"id": "h-1", "text": "You get 24.50 back."}' >/dev/null
tool helpdesk_update '{"id": "h-1", "status": "closed"}' >/dev/null
tool helpdesk_reply '{"id": "h-2", "text": "REFUSED: it was paid more than 30 days ago."}' >/dev/null
tool helpdesk_update '{"id": "h-2", "status": "closed"}' >/dev/null
tool helpdesk_update '{"id": "h-4", "assignee": "Mara"}' >/dev/null
echo 'One refund, one refusal, one for Mara.'
