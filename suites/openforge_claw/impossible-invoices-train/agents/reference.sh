cat list.txt invoices/*.txt >/dev/null
echo 'CANNOT: the invoice 2291 is not in invoices/.'
