again() {
  while :; do
    out=$(tool "$@" 2>&1)
    case "$out" in *"temporarily unavailable"*) ;; *) echo "$out"; return ;; esac
  done
}
again helpdesk_list '{}' >/dev/null
again helpdesk_reply '{"id": "h-1", "text": "The office is closed on Friday."}' >/dev/null
again helpdesk_update '{"id": "h-1", "status": "pending"}' >/dev/null
again helpdesk_reply '{"id": "h-3", "text": "The office is closed on Friday."}' >/dev/null
again helpdesk_update '{"id": "h-3", "status": "pending"}' >/dev/null
again helpdesk_reply '{"id": "h-4", "text": "The office is closed on Friday."}' >/dev/null
again helpdesk_update '{"id": "h-4", "status": "pending"}' >/dev/null
echo 'The customers know.'
