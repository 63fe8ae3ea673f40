cat list.txt invoices/*.txt >/dev/null
echo 'CANNOT: the invoice 5526 is not in invoices/.'
